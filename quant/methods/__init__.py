METHODS = {"rtn": None}
