"""Who is measured: one module a family of cases."""
