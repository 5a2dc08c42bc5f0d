"""The commands of ``hashnet``, a file each: ``configure(parser, words)``, ``run(arguments)`` → exit code."""
