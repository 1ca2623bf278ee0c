"""`python -m valve_tune.serve`: what `valve tune` runs."""

from valve_tune.serve.cli import main

raise SystemExit(main())
