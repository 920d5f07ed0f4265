"""`pytest tests/chaos --kills 40` (or CHAOS_KILLS=40): how many kills; --chaos-seed repeats one."""


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=None, help="processes to kill (default 10)")
    parser.addoption("--chaos-seed", type=int, default=None, help="first seed (default: of the day)")
