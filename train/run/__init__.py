"""A run: its folder, its processes, its cost before it starts and its record afterwards.

Reading order: `dry_run` (one step, to see what a run takes); `schedule`, `parallel`, `checkpoint` (its
folder), `signals` (being stopped); `artifact` (what it leaves).
"""
