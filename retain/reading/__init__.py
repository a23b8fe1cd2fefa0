"""Selection when reading: a cache that holds everything, of which each query reads the best pages.

Reading order: `settings` (what a policy states), `budget` (bytes that a step may read, as pages of each
layer), `page_index` (what stands for a page while pages are chosen), `quest`, `fasa`, `mpcache`, `baselines`
(a score of every page, one file a method), `reader` (chooses, gathers, attends, and counts what was read).
"""

from retain.reading.settings import METHODS, Reading

__all__ = ["METHODS", "Reading"]
