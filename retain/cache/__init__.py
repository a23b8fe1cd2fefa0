"""The ragged cache: exactly the kept entries of each row, and attention over them.

Reading order: `layout` (rooms of rows, and how entries get there), `precision` (in how many bits), `store`
(the rows of one layer), `layer_store` (the newest of them plain, others packed), `attend` (queries against
them), `equal_rows` (the dense calls where rows are equally long, and a token decoded on a CPU), `static_rows`
(all layers in one pool, for a compiled step), `file_format` (a conversation in one file). Rows stand side by
side again, to be scored anew, in `retain.attention.dense_view`.
"""
