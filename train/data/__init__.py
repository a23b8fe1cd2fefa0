"""Training data: documents, where they come from, and the order in which they are read.

Reading order: `document`, `settings`, `sources` (files and hub data sets), `rows` (a row becomes a document),
`chat`, `corpus` (in memory, or a stream larger than memory), `corpora` (held-out documents and order),
`branches` (texts read after a document), `packing` (which process reads which).
"""
