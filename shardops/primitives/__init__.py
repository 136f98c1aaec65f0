"""The ops: one file each, public function first."""
