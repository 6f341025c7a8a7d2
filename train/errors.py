# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake in a config, an argument, a file or a checkpoint.

    Its message says what is wrong, where, and what to do. The command line prints it on one line of
    stderr and exits with code 2; any other exception is a bug of ours and keeps its stack trace.
    """
