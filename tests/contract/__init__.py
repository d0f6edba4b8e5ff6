"""Requirements for every algorithm, codec and driver, as test suites over all registered ones."""
