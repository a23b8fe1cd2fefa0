"""Tasks: what is asked of a model, by suite.

Reading order: `suite` (what a task, an item and a suite are), `suites` (suites by name). The reference
model's: `reference`, `reference_more`, `reference_shift`. Tasks in text, for any model: `card`, `text`,
`rendering`, then one file a benchmark or kind of task.
"""
