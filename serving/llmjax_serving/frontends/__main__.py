import asyncio
import sys

from .worker import work

if __name__ == "__main__":
    sys.exit(asyncio.run(work(int(sys.argv[1]), int(sys.argv[2]))))
