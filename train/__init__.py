"""Distillation of retention gates from a frozen language model: `retain.train`.

Run anywhere, or from the repository root with a YAML:

    retain train MODEL DATA
    accelerate launch --quiet --config_file configs/accelerate/one_process.yaml \\
        train/distill.py --config configs/distill/reference.yaml

Reading order: `distill` (the entry; `arguments` is its command line), `assembly`, `loop`, `stage` with the
stages `local_stage`, `soft_stage` and `lookahead_stage`, `teacher` (the frozen model); `recipe` (the config;
`settings` defines its sections). The rooms: `data`, `objectives`, `calibration`, `run`.
"""
