"""`shardops.fuse`: finds in a traced function what one op can do in place of several.

| file | what it has |
|---|---|
| marking.py | how an op is seen in a traced program |
| graph.py | a program as a graph whose equations may be exchanged and put in another order |
| norms.py | a residual sum before a norm, a residual branch beside it |
| epilogues.py | bias and activation after a product |
| placement.py | where a product's result lies when it is made |
| expressions.py | which activation some equations compute |
| program.py | a traced program with its fusions found, as a function |
| report.py | what was fused, and what nearly |
| fuse.py | the public function |

Imports nothing here: the ops import `marking`, and the rest reads them.
"""
