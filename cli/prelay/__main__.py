import sys


def run() -> None:
    """Entry point of the console script. An interrupt while it imports is no fault to show."""
    try:
        from .main import run as main

        main()
    except KeyboardInterrupt:
        print("prelay: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
