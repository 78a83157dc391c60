"""A whole cluster with faults in one thread, by a seed: real routers, leaders, ranks and control channels.

`run.simulate` is the entry. Only devices, sockets, Ray and the clock are replaced:

    virtual_time.py   the event loop, whose clock jumps to the next event
    processes.py      a process: dies, pauses, and answers calls of the launcher
    network.py        packets of the control channels: delayed, lost, repeated, reordered, cut
    fabric.py         the data path with delays, cuts and broken connections
    rank_process.py   drives the threads of one rank; `group_process.py` the steps of a group
    router_process.py a router with the requests of its clients (`requests.py`)
    launcher.py       stands in for Ray: starts, links and replaces groups; with the real directory
    faults.py         what breaks, when, and on which message
    books.py          what must hold at any time and at the end
"""
