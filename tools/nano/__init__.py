"""The nano checkpoint: a small GLM-5.3-Flash-shaped model trained on data this package writes itself.

`python -m tools.nano.run_all --out DIR` writes the data, trains, quantises with exllamav3's own converter and
evaluates; `python -m tools.nano.cpu_check` adds what the CPU engine makes of it. The data are templates from
`facts.py`, `dialogues.py` and `toolbox.py` (Apache-2.0, as this repository) and running text from the Python standard
library (PSF licence, `corpus.py`). The resulting weights are released under Apache-2.0.
"""
