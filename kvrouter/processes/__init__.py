"""Several processes that serve one port, under one that keeps them.

    seat            what a process gets from the one that started it
    child           one such process, as its keeper sees it
    restarts        when one that ended starts again (pure)
    supervisor      keeps all of them, replaces them one by one, stops them
    joint_metrics   one scrape from all scrapes (pure)
    joint_admin     the one second port before theirs
    running         construction

Each process is a router of its own: its index, its connections to engines, its part of the
replica bus, by which all decide by one view of the load. The listening sockets belong to the
keeper, one per process (SO_REUSEPORT): connections that come while a process is replaced wait in
its socket for the next one, and none is refused.
"""
