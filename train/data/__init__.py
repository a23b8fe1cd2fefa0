"""Training data: documents, where they come from, and the order in which they are read.

Reading order: `document`, `settings`, `sources` (files and hub data sets), `rows` (a row becomes a document),
`chat`, `corpus` (held-out documents and order, in memory or as a stream), `branches` (texts read after a
document), `packing` (which process reads which); `samples` writes documents where there are none.
"""
