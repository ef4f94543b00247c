"""`python -m replicax`: the command line."""

from replicax.cli.main import app

if __name__ == "__main__":
    app(prog_name="replicax")
