"""`diptych up --ray`: the programs of a system as actors of a Ray cluster."""
