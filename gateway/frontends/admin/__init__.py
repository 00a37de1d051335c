"""`diptych.v1.AdminService`: the workers, their load, drain and flush, for operators."""
