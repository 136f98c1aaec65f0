"""A small sharded language model trained with shardops: the parts of `train_lm.py`."""
