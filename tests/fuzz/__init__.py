"""Drawn cases: any layout of any shape on any mesh and route, checked against float64."""
