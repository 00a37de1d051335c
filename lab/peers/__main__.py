import sys

from lab.peers.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
