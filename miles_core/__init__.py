"""Miles Flow: the library behind the flows and the command line. It never imports prefect."""
