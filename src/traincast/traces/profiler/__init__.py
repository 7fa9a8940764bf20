"""What people open a profiler's page for, as tables: kernels, rates, modules, collectives, launches, memory."""
