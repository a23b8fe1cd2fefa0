"""A run: its folder, its processes, its plan before it starts and its record afterwards.

Reading order: `plan` (memory and time beforehand) with `workload`, `model_shape` and `device`; `schedule`,
`parallel`, `checkpoint` (its folder), `signals` (being stopped), `progress`;
`artifact`, `card` and `curves` (what it leaves).
"""
