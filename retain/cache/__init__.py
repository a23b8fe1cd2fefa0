"""The ragged cache: exactly the kept entries of each row, and attention over them.

Reading order: `layout` (rooms of rows, and how entries get there), `precision` (in how many bits), `store`
(the rows of one layer), `attend` (queries against them), `equal_rows` (dense calls where rows are equally
long, and a token decoded on a CPU), `static_rows` (all layers in one pool, for a compiled step),
`file_format` (a conversation in one file). `retain.attention.dense_view` lays rows side by side again.
"""
