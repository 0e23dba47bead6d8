"""Benchmarks of the masked linear: `fxmask bench`, and `python -m fxmask.bench.gpu` for a first run on a GPU.

| module | what |
| --- | --- |
| cells | what is measured, in order of value |
| inputs | tensors and masks of a cell |
| providers, torch_sparse | the implementations that are compared |
| gate | no time for a wrong result |
| clock | timing on CUDA and on a CPU |
| costs | FLOP and bytes of a cell, from `kernels.layer_cost` |
| provenance | versions, commit, clocks |
| table | a csv: columns, appending, resuming |
| session, driver | what runs share; one run over the cells |
| summary | who wins from which ratio on, also as a plot |
| stages, gpu, device_stages | the run on a GPU, stage by stage |
| part, probes, sweeps, refreshes | its stages with a csv of their own: a device's limits, tiles and splits, refreshes |
| findings, goals | what was found, and the goals that it is compared with |
"""
