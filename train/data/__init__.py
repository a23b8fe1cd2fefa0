"""Training data: documents, where they come from, and the order in which they are read.

Reading order: `document`, `sources` (files and hub data sets), `rows` (a row becomes a document), `chat`,
`corpora` (held-out documents and order), `corpus` (in memory, or a stream larger than memory), `branches`
(what is read after a document), `packing` (which process reads which), `features` (kept on disk).
"""
