"""Tasks: rows, where they come from, and how a model reads them.

Reading order: `row` (a question on a context), `sources` (rows by a task's name), `files` (tables and Python
files), `encode` (rows in tokens). Generators: `haystacks`, `ruler`, `facts`, `reference`; `longbench`.
"""
