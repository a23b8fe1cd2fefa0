"""The report of a run: one list of sections, as `report.md` and `report.html`.

Reading order: `run`, `sentences`, `blocks`, `sections` (of `tables`, `measured`, `document_view`), `render`;
`plots` and `picture`; `brief`; `kept` (entries kept, token by token).
"""
