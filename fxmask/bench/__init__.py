"""Benchmarks of the masked linear: `fxmask bench`, and `python -m fxmask.bench.gpu` for a first run on a GPU.

| module | what |
| --- | --- |
| cells | what is measured, in order of value |
| inputs | tensors and masks of a cell |
| providers, torch_sparse | the implementations that are compared |
| gate | no time for a wrong result |
| clock | timing on CUDA and on a CPU |
| costs | FLOP and bytes of a cell, from `kernels.cost` |
| provenance | versions, commit, clocks |
| table | the csv: columns, appending, resuming |
| summary, plot | who wins from which ratio on |
| driver | one run over the cells |
| stages, gpu, device_stages, goals | the run on a GPU, stage by stage, and the goals that it is compared with |
"""
