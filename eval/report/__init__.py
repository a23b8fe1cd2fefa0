"""The report of a run: tables, pictures, a page, and files for other tools.

Reading order: `markdown`, `picture`, `html_page` with `page_scores`, `page_measured`, `document_view`,
`tabular` and `figures`; `kept` (entries kept, token by token), `exports`.
"""
