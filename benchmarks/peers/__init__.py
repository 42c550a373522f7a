"""Quail beside the engines that one would take instead, measured side by side.

Each engine runs in a process, and an environment, of its own, and is spoken to in lines of JSON
(`adapters/serving.py` says how); nothing of a peer is imported here.

    cli.py            arguments; the order of things
    workloads.py      the questions: as SQL for Quail, as the same token ids for the others
    tokens.py         SQL to token ids
    engines.py        the engines: command, environment, sample
    environments.py   one environment a peer, made on demand
    weights.py        the model as a folder that peers read
    process.py        one engine's process: ask, pause, resume, memory
    rounds.py         engine after engine, round after round
    summary.py        runs to medians, spreads and ratios
    tables.py         Markdown, and the places in pages where it stands
    plots.py          SVG
"""
