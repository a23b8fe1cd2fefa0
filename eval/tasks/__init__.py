"""Tasks for models, by suite.

Reading order: `suite` (types: task, item, suite), `suites` (suites by name). The reference model's:
`reference_basic`, `reference_more`. Tasks in text, for any model: `task_card`,
`text_suite`, `rendering`, then one file a benchmark or kind of task.
"""
