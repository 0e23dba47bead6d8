"""Benchmarks of the masked linear: `fxmask bench`, and `python -m fxmask.bench.gpu` for a first run on a GPU.

| module | what |
| --- | --- |
| command | the options of `fxmask bench` |
| cells | what is measured, in order of value |
| inputs | tensors and masks of a cell |
| providers, torch_sparse | the implementations that are compared |
| gate, tolerance | no time for a wrong result |
| clock, stopwatch | timing on CUDA and on a CPU; of one call, in turns |
| costs | FLOP and bytes of a cell, from `kernels.layer_cost` |
| provenance | versions, commit, clocks |
| table | a csv: columns, appending, resuming |
| session, driver | what runs share; one run over the cells |
| compare, summary | ratios to the baselines; who wins from which ratio on, also as a plot |
| interleaved, contenders, floor, regret | on a CPU: whole steps in turns, by whom; `--floor`; `--dispatch` |
| systems, pruning, dropping, nm | `--system`, and the stages of the same |
| stages, gpu, device_stages | the run on a GPU, stage by stage |
| precompiling | its kernels, compiled side by side |
| part, parts, probes, sweeps, refreshes | its stages with a csv of their own: a device's limits, tiles and splits, refreshes |
| findings, goals | what was found, and the goals that it is compared with |
| fit_choice | the constants of `kernels.gpu_choice`, from a csv |
"""
