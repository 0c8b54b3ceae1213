"""Before a run: what its declaration, model, machine and disk will bear. ``cz.check(run)``, ``croze check FILE``."""
