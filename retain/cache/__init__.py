"""The ragged cache: exactly the kept entries of each row, and attention over them.

Reading order: `codec` (keys and values in few bits), `layout` and `moves` (rooms of rows, and how entries get
there), `store` (the rows of one layer), `layer_store` (the newest of them plain, others packed), `attend`
(queries against them), `equal_rows` (the dense calls where rows are equally long), `static_rows` (the layout
that a compiled step wants), `dense_view` (rows side by side again, to be scored anew), `file_format` (a
conversation in one file).
"""
