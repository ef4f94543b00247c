"""How a running job is seen from outside: a private directory per job, a socket per task.

    <runtime directory of the user>/jobs/<job>/<task>.sock

A task answers small JSON requests there: its status, the stacks of its threads, and what other
modules register. `replicax top` and `replicax trace` ask; nothing listens on a network.

    job_directory    which directory a job has, which jobs run, and what is left of dead ones
    endpoint         the socket of one task, and the one thread that answers
    program          a plain program that asks to be observed
    requests         requests that every task of a process answers, beside its own
    client           asks tasks, and kills them
    progress         the steps and the logged values of this process, for its status
    process_facts    memory, processor time, threads and descriptors of this process
"""
