"""`fxmask.advise`: what masks would gain in a model's own training step on this device, from times of its single layers.

| module | what |
| --- | --- |
| layers | which linears a forward calls, and on what; layers of one signature are timed once |
| unit | a layer's own training step, dense and masked in turns |
| search | blocks and ratios in order, until the time is spent; what is sure to lose is left out |
| step, trial | a whole step, timed; a copy of the model, dense and masked by a plan |
| plan | from the layers' times to the step's: which layers pay at each ratio |
| advice | what is returned: the table, the plans, the call |
| advise, command | the public function; `fxmask advise` |
"""
