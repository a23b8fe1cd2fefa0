"""The report of a run: `report.md`, `report.html` and `scores.png`, from its table alone.

Reading order: `render`, `table`, `text`, `picture`, `page`.
"""
