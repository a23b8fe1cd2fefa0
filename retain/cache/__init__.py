"""The ragged cache: exactly the kept entries of each row, and attention over them.

Reading order: `store` (the entries of one layer), `packed_store` (entries in few bits), `tiered_store` (a
layer of both), `attend` (queries against them), `equal_rows` (the dense calls where rows are equally long),
`step_rows` (a token decoded on a CPU), `static_rows` (all layers in one pool, for a compiled step),
`dense_view` (rows side by side again, to be scored anew), `file_format` (a conversation in one file),
`tier_file` (few bits in such a file).
"""
