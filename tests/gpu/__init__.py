"""Everything that runs on a GPU, in one command: ``python3 -m tests.gpu --report FILE``.

It needs Python, torch and pytest, and nothing else: no Jupyter, no network. From the outside in: `__main__` (the
command), `parts` (what runs), `supervise` (processes with a time limit), `cells` (notebooks without Jupyter),
`marked_tests` (a plugin of pytest), `collectives` (the benchmark), `report` (the file) and `land` (the site's data).
"""
