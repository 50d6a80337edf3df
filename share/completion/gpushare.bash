eval "$(_GPUSHARE_COMPLETE=bash_source gpushare)"
