"""The ragged cache: exactly the kept entries of each row, and attention over them.

Reading order: `store` (the entries of one layer), `packed_store` (entries in few bits), `tiered_store` (a
layer of both), `attend` (queries against them), `equal_rows` (the dense calls where rows are equally long),
`dense_view` (rows side by side again, to be scored anew), `file_format` (a conversation in one file),
`tier_file` (few bits in such a file).
"""
