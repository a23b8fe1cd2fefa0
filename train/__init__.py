"""Distillation of retention gates from a frozen language model: `retain.train`.

Run from the repository root:

    accelerate launch --quiet --config_file configs/accelerate/one_process.yaml \\
        train/distill.py --config configs/distill/reference.yaml

Reading order: `distill` (the entry; `arguments` is its command line), `recipe` (its config; `rules` collects
what is wrong with one), `loop`, `stage` with the stages `local_stage`, `soft_stage` and
`lookahead_stage`, `teacher` (the frozen model). The rooms: `data`, `objectives`, `calibration`, `run`.
"""
