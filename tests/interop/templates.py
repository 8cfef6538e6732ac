#!/usr/bin/env python3
"""Compares chat templates rendered by mantissa with Jinja 3 as transformers sets it up.

    templates.py MANTISSA                     compares; exit 1 if a text differs or a template that Jinja refuses renders
    templates.py MANTISSA --write FILE.json   also writes the templates with Jinja's texts (tests/data/chat_templates.json)

A template that mantissa refuses and Jinja renders is listed; the file marks it `"refused": true`. Needs transformers and jinja2.
Left out: objects of Jinja itself when they print (`{{ joiner }}`, `{{ self }}`, `{{ range(3) }}`), `attr` of a dictionary, `1 in 'a'`.
"""

import itertools
import json
import subprocess
import sys

from transformers.utils.chat_template_utils import _cached_compile_jinja_template as compile_template

MESSAGES = [{"role":"system","content":"Be brief."},{"role":"user","content":" Hi <b>&amp; ünï\n"},{"role":"assistant","content":"Ho, a-b-c.","tool_calls":[{"function":{"name":"f","arguments":{"x":1,"y":[1.5,None,True,"é🙂"],"z":{"k":"v"}}}}]},{"role":"user","content":"<think>x</think>\nDone\t1"}]
TOOLS = [{"type":"function","function":{"name":"get","description":"d \"q\" 'r'","parameters":{"type":"object","properties":{"city":{"type":"string","enum":["a","b"]},"n":{"type":"integer","default":3}},"required":["city"]}}}]
CONTEXT = {"messages": MESSAGES, "tools": TOOLS, "documents":None,"add_generation_prompt":True,"bos_token":"<s>","eos_token":"</s>","enable_thinking":False,"n":7,"x":0.1,"s":"Hello World foo bar","e":"","big":12345678901234567890,"d":{"b":1,"a":[True,None,2.5],"ü":"é"},"date":"26 Jul 2024"}
E = []
def e(*xs):
    for x in xs: E.append("{{ "+x+" }}")
# string methods
for m in ["upper()","lower()","title()","capitalize()","swapcase()","casefold()","strip()","lstrip('H')","rstrip('r')","strip('Hr')","split()","split(' ')","split(' ',1)","split(' ', maxsplit=1)","split(maxsplit=1)","rsplit()","rsplit(' ',1)","rsplit(' ', maxsplit=2)","rsplit(maxsplit=1)","partition(' ')","rpartition(' ')","partition('zz')","rpartition('zz')","removeprefix('Hello')","removesuffix('bar')","removeprefix('zz')","index('o')","rindex('o')","find('o',5)","find('zz')","rfind('o',0,5)","index('o',5)","count('o')","count('o',5)","count('')","startswith('He')","startswith(('a','He'))","startswith('World',6)","endswith('bar')","endswith(('x','bar'))","endswith('World',0,11)","replace('o','0')","replace('o','0',1)","replace('o','0',count=1)","isupper()","islower()","isdigit()","isalpha()","isspace()","istitle()","isalnum()","ljust(25)","rjust(25,'*')","center(24)","center(25,'-')","zfill(25)","splitlines()","join(['a','b'])","encode('utf-8')","format(1)","isdecimal()","isnumeric()","isidentifier()","expandtabs()","isascii()","__len__()","rjust(3)","find('World')"]:
    e("s."+m)
e("'a\\nb\\r\\nc\\x0bd'.splitlines()","'a\\nb'.splitlines(true)","'  a  b '.split()","'  a  b '.rsplit(none,1)","'-5'.zfill(4)","'+5'.zfill(4)","'a,b,,c'.split(',')","''.split()","''.split(',')","'x'.center(4)","'xy'.center(5)","'{} and {x}'.format(1, x='y')","'{0}{1}{0}'.format('a','b')","'{:>5}|{:<5}|{:^5}'.format(1,2,3)","'{:.2f}'.format(3.14159)","'{!r}'.format('a')","'12'.isdigit()","'1.5'.isdigit()","'²'.isdigit()","'ß'.casefold()","'ß'.upper()","'ŉ'.title()")
# percent
for f in ["'%s' % 'a'","'%s-%s' % ('a', 1)","'%d' % 3","'%05d' % 42","'%.2f' % 3.14159","'%x' % 255","'%5s|' % 'ab'","'%-5s|' % 'ab'","'%s' % none","'%s' % true","'%s' % [1,'a']","'%r' % 'a\\'b'","'%s%%' % 5","'%(a)s %(b)d' % {'a':'x','b':2}","'a' ~ '%s' % 'b' ~ 'c'","'%s' % s.split(' ')[0]","'%s' % s|upper","'x: %s' % (n,)","'%s %s' % ('a',)","'%s' % ('a','b')","'no' % ()","7 % 3","n % 4","-7 % 3","(n % 2) == 0","loop","'%s' % d.b","'%s' % d['ü']","'%+d' % 5","'%e' % 12345.678","'%g' % 0.0001","'%c' % 'a'","'%i' % 3.9","'%s' % 1.0","'%s' % x","'{}%'.format(5)","'%s' % messages[0].content ~ '!'","'%s' % (s ~ '%s' % 'q')","'%10.3f|' % 2.5","'% d' % 5","'%o' % 8","'%X' % 255","'%#x' % 255","'%s' % undefined_thing","\"%s\" % \"dq\"","'100%'","'%s' %   s","['%s' % 1, '%s' % 2]|join(',')"]: e(f)
# tojson
for a in ["","()","(indent=2)","(indent=4)","(2)","(true)","(ensure_ascii=true)","(ensure_ascii=True, indent=2)","(separators=(',',':'))","(separators=[',',':'])","(separators=(', ', ': '), sort_keys=true)","(sort_keys=true)","(indent='\\t')","(indent=0)","(indent=none)","(separators=(',',':'), indent=2)","(false, 2)","(false, none, (',',':'), true)","(indent=2, ensure_ascii=false)","(foo=1)","(separators=',')","(separators=none)"]:
    e("d|tojson"+a,"tools|tojson"+a,"messages[2].tool_calls|tojson"+a)
e("1.0|tojson","1e22|tojson","1e-7|tojson","x|tojson","big|tojson","'é🙂\\u007f\\u2028'|tojson(ensure_ascii=true)","'é🙂'|tojson","none|tojson","true|tojson","undefined_thing|tojson","[1,2]|tojson|length","(1,2)|tojson","{'a':(1,2)}|tojson","{1:2}|tojson","{true:1}|tojson","'<&>'|tojson","s|tojson|safe","range(3)|list|tojson","d.items()|list|tojson","d.keys()|list|tojson", "'\\x01\\x1f\\t\\b\\f'|tojson","123456789.123|tojson","1e16|tojson","1e15|tojson","0.0001|tojson","0.00001|tojson","-0.0|tojson")
# printing
e("none","true","[1,'a',none,true,2.5]","{'a':1,'b':[none]}","(1,2)","(1,)","1.0","1e20","0.1+0.2","1/2","7//2","2**10","2**-1","n/7","'a'~1","'a'~none","'a'~true","'a'~1.0","'a'~[1,none]","1~2","'a'+'b'","'a'*3","[1]+[2]","d","d.items()|list","d.values()|list","d.keys()|list","\"it's\"|list","[\"it's\"]","['a\"b\\'c']","['a\\nb\\\\']","['é']","['\\x00']","none|string","true|string","1.5|string","[1]|string","true|int","'3'|int","'x'|int","'3.7'|float","3.7|int","[1,2,3]|join('-')","[1,none,true]|join(',')","[1.0]|join","d|length","s|length","s[0]","s[-1]","s[1:4]","s[::-1]","s[::2]","messages[1:]|length","messages[::-1][0].role","big","-n","+n","not n","n and s","e or 'default'","n if e else 'no'","n if e","1 < 2 < 3","n in [7]","'ell' in s","'a' not in s","n == 7.0","1 == true","'1' == 1","none == false","s is string","n is number","n is integer","x is float","none is none","tools is defined","undefined_thing is defined","undefined_thing is undefined","undefined_thing","undefined_thing.x","d.missing","d.missing is defined","messages is iterable","messages is sequence","d is mapping","s is mapping","n is odd","n is divisibleby(7)","true is boolean","true is true","n is eq(7)","n is gt 3","s is lower","e is not none","1 is sameas 1","tools is iterable and tools is not mapping","s is sequence")
# filters
for f in ["s|upper","s|lower","s|title","s|capitalize","s|trim","' a '|trim","'xxaxx'|trim('x')","s|replace('o','0')","s|length","s|first","s|last","s|reverse","[3,1,2]|sort","[3,1,2]|sort(reverse=true)","['b','A']|sort","[1,2,3]|sum","[1,2,3]|max","[1,2,3]|min","[1,1,2]|unique|list","messages|map(attribute='role')|list","messages|selectattr('role','equalto','user')|list|length","messages|rejectattr('role','equalto','user')|map(attribute='role')|join(',')","messages|selectattr('tool_calls','defined')|list|length","[1,2,3,4]|batch(2)|list","[1,2,3,4]|slice(2)|list","d|dictsort","d|items|list","e|default('x')","e|default('x',true)","undefined_thing|default('y')","undefined_thing|d('z')","s|truncate(8)","s|wordcount","s|indent(2)","'a\\nb'|indent(2)","'a\\nb'|indent(2,true)","'a\\nb\\n\\nc'|indent(4, first=true)","'a\\nb\\n\\nc'|indent(4, blank=true)","3.14159|round(2)","3.5|round","3.7|round(0,'floor')","-3|abs","'<a>'|escape","'<a>'|e","'a b'|urlencode","'%s-%s'|format('a',1)","[1,2]|tojson","'abc'|list","s|center(30)","'a'|string","['a','b']|map('upper')|list","[0,1,none]|select|list","[0,1,2]|reject('odd')|list","[[1,2],[3,4]]|map('first')|list","messages|groupby('role')|map('first')|list","{'a':1}|xmlattr","s|filesizeformat","1000000|filesizeformat","'http://x.y'|urlize","s|wordwrap(5)","'<b>x</b>'|striptags","[1,2,3]|random is number","s|safe","[{'a':1},{'a':3}]|sum(attribute='a')","[{'a':1},{'a':3}]|map(attribute='a')|sum","'a-b'.split('-')|first","s|pprint","[1,[2]]|pprint"]: e(f)
# filters with other arguments, and texts at their edges
for f in ["('x\\n'|indent(4)) ~ '<END>'","''|indent(2,true)","'a\\r\\nb'|indent(4)","'a\\nb'|indent('> ')","'a\\n\\n'|indent(2, blank=true)","s|replace('o','0',1)","s|replace('o','0',count=1)","1|replace(1,2)","undefined_thing|default('x', boolean=true)","e|default('x', boolean=true)","none|default('x')","none|default('x', true)","n|default","undefined_thing|default","'xxaxx'|trim(chars='x')","'\\n a \\t'|trim","s|center(31)","'ab'|center(5)","'abc'|center(4)","'abc'|center(2)","\"<'\\\"/&>\"|e","'<'|e|e","'<'|forceescape","'<'|e|forceescape","none is iterable","1 is iterable","1.5 is iterable","true is iterable","undefined_thing is iterable","d is iterable","s is iterable","[] is iterable","'a-b c_d é'|wordcount"]: e(f)
T = list(E)
def t(*xs): T.extend(xs)
t("{% for m in messages %}\r\n<|{{ m.role }}|>\r\n{{ m.content }}\r\n{% endfor %}","a\rb\r\nc\n","a\n","a\n\n","  {% if true %}  \n x \n  {% endif %}\n y","{%- if true -%} a {%- endif -%} b","{{- 'a' -}}  b","{# c #}\nx","{#- c -#}\n x","{% raw %}{{ x }}{% endraw %}","{% set a = 1 %}{{ a }}","{% set a %}block{% endset %}{{ a }}","{% set a, b = 1, 2 %}{{ a }}{{ b }}","{% set ns = namespace(x=1) %}{% for i in [1,2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}","{% set ns = namespace() %}{% set ns.a = [] %}{% set ns.a = ns.a + [1] %}{{ ns.a }}","{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}","{% for k in d %}{{ k }}{% endfor %}","{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a','b') }}{% endfor %}","{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if loop.nextitem is defined }}|{% endfor %}","{% for m in messages if m.role == 'user' %}{{ loop.index }}{% else %}none{% endfor %}","{% for m in [] %}x{% else %}none{% endfor %}","{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}","{% macro f(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(1, c='y') }}","{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, k=3) }}","{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}","{% macro r(x, n) %}{% if n > 0 %}{{ x }}{{ r(x, n-1) }}{% endif %}{% endmacro %}{{ r('a', 3) }}","{% filter upper %}abc{% endfilter %}","{% with a = 1 %}{{ a }}{% endwith %}","{% if messages[0]['role'] == 'system' %}{% set system = messages[0].content %}{% else %}{% set system = '' %}{% endif %}{{ system }}","{% for m in messages %}{% set x = loop.index %}{% endfor %}{{ x }}","{% for i in range(3) %}{{ i }}{% endfor %}","{% for i in range(10, 0, -3) %}{{ i }},{% endfor %}","{% for a, b in [(1,2),(3,4)] %}{{ a+b }}{% endfor %}","{% for m in messages recursive %}{{ m.role }}{% endfor %}","{{ raise_exception('no') }}","{% if not tools %}x{% elif n > 5 %}y{% else %}z{% endif %}","{% generation %}a{% endgeneration %}b","{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}","{{ 'a\\nb' }}","{{ 'a\\tb\\u00e9\\x41\\'' }}","{{ 'a\\d' }}","{{ 'it\\\\n' }}","{{ \"a\nb\" }}","{{ 'a' 'b' }}","{{ dict(a=1)['a'] }}","{{ {'a': 1}.a }}","{{ messages[-1].content.split('</think>')[-1].lstrip('\\n') }}","{% if '</think>' in messages[-1].content %}{{ messages[-1].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}{% endif %}","{%- for tool in tools %}\n    {{- tool | tojson(indent=4) }}\n    {{- \"\\n\\n\" }}\n{%- endfor %}","{% set content = messages[1]['content'] | trim %}{{ '<|start|>' + content + '<|end|>' }}","{{ (messages|length) - 1 }}","{{ messages|length - 1 }}","{% set loop_messages = messages[1:] %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}bad{% else %}ok{% endif %}{% endfor %}","{{ 'x' if n is defined and n is not none else 'y' }}","{{ namespace(a=1).a }}","{% set x = {'a': 1} %}{% set _ = x.update({'b': 2}) %}{{ x }}","{% set x = [1] %}{% set _ = x.append(2) %}{{ x }}","{% set j = joiner(',') %}{{ j() }}a{{ j() }}b","{% set c = cycler('a','b') %}{{ c.next() }}{{ c.next() }}","{{ [1,2,3][5] is defined }}","{{ messages[0].get('role') }}","{{ messages[0].get('x', 'dflt') }}","{{ messages[0].get('x') }}","{{ 'content' in messages[0] }}","{{ messages[0]['content']['x'] is defined }}","{{ s is not string or n }}","{% block a %}x{% endblock %}","{% autoescape true %}{{ '<a>' }}{% endautoescape %}","{% do x %}","{% include 'x' %}","{% import 'x' as y %}","{% extends 'x' %}","{{ s.__class__ }}","{{ ''.__class__.__mro__ }}","{{ x.y.z }}","{{ undefined_thing['a'] }}","{{ none.x }}","{{ 1 + 'a' }}","{{ 'a' + 1 }}","{{ [1] + 'a' }}","{{ none + 1 }}","{{ 1 / 0 }}","{{ 1 // 0 }}","{{ 'a' < 'b' }}","{{ [1,2] < [1,3] }}","{{ 'b' in {'b': 1} }}","{{ undefined_fn() }}","{{ s.nomethod() }}","{{ messages | nofilter }}","{{ n is notest }}","{{ range(3)|list }}","{{ (1,2)[0] }}","{{ 'abc'[1:] ~ 'd' }}","{{ not true }}{{ not none }}","{{ true and none }}","{{ 0 or none }}","{{ date }}","{{ 'a' if false }}|","{{ loop is defined }}","{% for m in messages %}{{ loop.depth }}{% endfor %}","{{ [1,2,3]|map('string')|join(', ') }}","{{ ['a','b'].index('b') }}","{{ [1,2,2].count(2) }}","{{ (1,2).index(2) }}","{{ ['a'].copy() }}","{{ d.copy() }}","{% for g in messages|groupby('role') %}{{ g.grouper }}{{ g.list|length }};{% endfor %}","{{ {'a':1}.items()|list }}","{{ s|map('upper')|join }}","{{ '\\u4f60' }}","{{ 'x'.join(messages|map(attribute='role')) }}","{{ 1_000 }}","{{ 0x1F }}","{{ 1e3 }}","{{ .5 }}","{{ true }}{{ True }}{{ none }}{{ None }}{{ false }}{{ False }}","{{ n|float }}","{{ '%.1f'|format(n) }}","{{ 10|string|length }}","{{ messages|tojson|length > 10 }}","{{ (s|length) % 5 }}","{{ s|length % 5 }}","{{ n ** 2 % 5 }}","{{ 'a' ~ n % 4 }}","{{ 'a%sb' % n ~ 'c' }}")

# Conversations as public models write them: every combination of marks, system turn, content, tools and end.
MARKS = [
    ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    ("<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ("{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}", "{{ '<end_of_turn>\\n' }}", "<start_of_turn>model\n"),
    ("{%- if m['role'] == 'user' %}\n    {{- '[INST] ' }}\n{%- endif %}", "{{- ' [/INST]' if m.role == 'user' else eos_token }}", ""),
]
SYSTEM = [
    "",
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ bos_token }}{{ messages[0].content }}\n{% else %}{% set rest = messages %}{% endif %}",
    "{%- set ns = namespace(system='') -%}\n{%- for m in messages if m.role == 'system' -%}\n    {%- set ns.system = ns.system ~ m.content -%}\n{%- endfor -%}\n{{- '<<SYS>>%s<</SYS>>' % ns.system -}}\n",
]
CONTENT = [
    "{{ m.content }}",
    "{{ m['content'] | trim }}",
    "{% if m.content is string %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content | map(attribute='text') | join }}{% endif %}",
    "{%- if m.content.startswith('<think>') -%}{{ m.content.partition('</think>')[2].removeprefix('\\n') }}{%- else -%}{{ m.content.rsplit('-', 1) | first }}{%- endif -%}",
]
CALLS = [
    "",
    "{% if m.tool_calls %}{% for call in m.tool_calls %}\r\n<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}",
    "{%- for call in m.tool_calls or [] -%}[{{ call.function.name }}({% for k, v in call.function.arguments.items() %}{{ k }}={{ v | tojson(separators=(',', ':'), ensure_ascii=true) }}{{ ', ' if not loop.last }}{% endfor %})]{%- endfor -%}",
]
for (begin, end, prompt), system, content, calls in itertools.product(MARKS, SYSTEM, CONTENT, CALLS):
    turns = "{%% for m in %s %%}%s%s%s%s{%% endfor %%}" % ("rest" if "set rest" in system else "messages", begin, content, calls, end)
    tools = "{% if tools %}{{ tools | tojson(indent=2) }}\n{% endif %}" if calls else ""
    T.append(system + tools + turns + "{% if add_generation_prompt %}" + prompt + "{% endif %}")


def jinja(template):
    """Returns the text, or None if Jinja refuses the template."""
    try:
        return compile_template(template).render(**CONTEXT)
    except Exception:
        return None


def ours(mantissa, template):
    request = json.dumps({"template": template, "contexts": [CONTEXT]})
    done = subprocess.run([mantissa, "render-chat"], input=request, capture_output=True, text=True)
    answer = json.loads(done.stdout)[0] if done.returncode == 0 else {}
    return answer.get("Text")


def main():
    mantissa, wrong, refused, rows = sys.argv[1], 0, 0, []
    for template in T:
        want, got = jinja(template), ours(mantissa, template)
        row = {"template": template, "text": want}
        if want is not None and got is None:
            refused += 1
            row["refused"] = True
            print("refused ", repr(template))
        elif want != got:
            wrong += 1
            print("differs ", repr(template), "\n  expected", repr(want), "\n  got     ", repr(got))
        rows.append(row)
    print(f"{len(T)} templates: {wrong} differ, {refused} refused")
    if "--write" in sys.argv:
        with open(sys.argv[sys.argv.index("--write") + 1], "w", encoding="utf-8") as file:
            json.dump({"context": CONTEXT, "rows": rows}, file, indent=0, ensure_ascii=False)
            file.write("\n")
    sys.exit(1 if wrong else 0)


main()
