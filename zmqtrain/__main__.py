"""``python -m zmqtrain``: the same as the ``zmqtrain`` command."""

from zmqtrain.cli.main import main

if __name__ == "__main__":
    main()
