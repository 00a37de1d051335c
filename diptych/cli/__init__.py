"""The `diptych` command and the supervisor that runs every program on one machine."""
