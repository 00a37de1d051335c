"""`python -m lab.interference`: what disaggregation is for, and what it costs, on one machine.

Do streams keep their pace while long prompts arrive back to back, do prompts keep theirs, and is a core lent
when only one phase has work? Beside that, what a cached prefix saves, and how long a start takes.
"""
