"""Cost of a change: two revisions of this repository, each a whole system, under the same load by turns.

    python -m lab.revisions BEFORE [AFTER] [--clients 16] [--rounds 10] [--dtype auto]

Each revision is unpacked into build/revisions/ and its native step is built (three or four minutes, once).
Both systems stay up; in every round each has the load once, in alternating order, so that the machine's drift
meets both. The ratio is taken within each round. The table has CPU time a token, over all processes of a
system, beside tokens a second: what other guests of the machine take changes the latter only.

Each system must consist of its revision's own files: before the start the folder of every package is checked,
and then the native step that its processes have mapped.
"""
